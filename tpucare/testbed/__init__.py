"""What stands in for the outer world: the emulated cloud, the W&B stand-in, simulations, the demo and the audit."""
