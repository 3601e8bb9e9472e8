"""Plans of merges: blocks, donors, moves, tasks, planner."""
