"""
`tpucare demo`: a real training through preemptions, on an emulated cloud, and the proof that nothing was lost.

A door like the daemon: it starts the emulator here and `tpucare daemon` as a process of its own, plays the data centre
that takes nodes away, and compares the end with a run that nobody disturbed. Needs the extra `demo`.
"""
