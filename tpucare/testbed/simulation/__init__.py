"""
The real engine and the real decisions under a virtual clock, in the emulator's world, with simulated workers.

One seed gives one history, byte for byte: months pass in minutes, storms can be told again, and what a rule promises
is looked at after every step. Nothing here goes past `ports`, and `engine` is the file that the daemon runs.
"""
