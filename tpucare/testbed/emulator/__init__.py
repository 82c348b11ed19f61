"""
The emulator: the Cloud TPU API with rules for capacity and faults, and a real sshd and screen for every worker.

`world` holds the rules (no threads, no clock, no I/O), `api` serves them over gRPC and REST, `machines` runs the
workers and `storage` the buckets. `testbed.audit` checks the audit log by the rules of docs/design.md, section 5.
"""
