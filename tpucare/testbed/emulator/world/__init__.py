"""The rules of the emulated cloud, without threads, clock or I/O; `world` puts the parts together."""
