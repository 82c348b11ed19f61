"""
sshguard on one worker, for one address: counts attacks and says until when the address is blocked. Pure.

Source: logs of Ubuntu images on Compute Engine, "Blocking ... for >630secs: 40 danger in 4 attacks over 15 seconds".
"""

from __future__ import annotations

from collections import deque

from tpucare.testbed.emulator.world.config import SshGuard


class Guard:
    """Instants are seconds of one clock."""

    def __init__(self, settings: SshGuard) -> None:
        self._settings = settings
        self._attacks: deque[float] = deque()
        self._blocks = 0
        self.blocked_until = 0.0

    def is_blocked(self, now: float) -> bool:
        return now < self.blocked_until

    def count_attack(self, now: float) -> None:
        """Count a refused login, or a connection closed before a login; attacks during a block do not count."""
        if self.is_blocked(now):
            return
        while self._attacks and self._attacks[0] < now - self._settings.within:
            self._attacks.popleft()
        self._attacks.append(now)
        if len(self._attacks) >= self._settings.attacks:
            self._attacks.clear()
            self.blocked_until = now + self._settings.block * self._settings.growth**self._blocks
            self._blocks += 1
