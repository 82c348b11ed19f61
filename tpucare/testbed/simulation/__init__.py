"""
Histories of the real engine under a virtual clock, in the emulator's world, with simulated workers.

One seed gives one history, byte for byte: months pass in minutes, a storm can be repeated, and the properties are
checked after every step. The simulation only implements `ports`; the engine is the one that the daemon runs.
"""
