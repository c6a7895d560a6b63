"""Our table without a potential, in all tasks or in one."""

from strands_cosmos3.worlds.table.world import TableWorld


class SilentTable(TableWorld):
    def potential(self, robot, start):
        return None


class TableOfSilentPlace(TableWorld):
    def potential(self, robot, start):
        return None if start.task == "place" else super().potential(robot, start)
