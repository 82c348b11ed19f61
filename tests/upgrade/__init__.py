"""State as earlier versions of tpucare wrote it, for the tests of an upgrade."""
