"""What a merge does to which tensor: blocks, donors, moves, tasks, planner."""
