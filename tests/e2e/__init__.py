"""The whole of tpucare on real gRPC, sshd and screen: `kits.deployment` builds it, the tests say what happens in it."""
