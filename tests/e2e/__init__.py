"""The whole of tpucare on real gRPC, sshd and screen: `kit` builds the house, the tests say what happens in it."""
