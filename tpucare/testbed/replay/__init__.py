"""
A fleet on recorded capacity: the real engine, or a policy to compare with, lives a recorded week in virtual time.

Every one meets the same capacity at the same instants (`recordings`) and is judged by one account (`account`): where
each second went, what it cost, how often the cloud was asked. `engine` lives it with the engine that the daemon runs,
`policies` without; `replays` runs many of them over processes.
"""
