"""The workers of the emulated nodes: real processes on this machine."""
