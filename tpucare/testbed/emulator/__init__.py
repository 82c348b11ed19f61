"""
The cloud in a box: the Cloud TPU API v2 as a world with rules, and real machines in miniature behind it.

`world` holds the rules (no threads, no clock, no I/O); what serves it over gRPC and gives every worker an sshd stands
beside it, and `check` replays its audit log against the rules that tpucare promises never to bend.
"""
