"""The mergekit plugin: hooks, planner, tasks. The only part of the package that imports mergekit."""
