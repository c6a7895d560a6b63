"""Our table without a potential."""

from strands_cosmos3.worlds.table.world import TableWorld


class SilentTable(TableWorld):
    def potential(self, robot, start):
        return None
