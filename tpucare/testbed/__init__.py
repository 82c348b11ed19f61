"""Stand-ins for the outer world: the emulated cloud, the W&B server, simulations, the demo and the audit."""
