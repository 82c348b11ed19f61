"""Scripts and orders for workers behind `ports.Launcher`; reaches workers through `ports.Remote` alone."""
