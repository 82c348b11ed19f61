"""
`tpucare demo`: a real training through preemptions, on an emulated cloud, and the proof that nothing was lost.

It starts the emulator in this process and `tpucare daemon` as a process of its own, preempts nodes at seeded moments,
and compares the result with an undisturbed run. Needs the extra `demo`.
"""
