"""Getting into mergekit: hooks, extensions, the merge method. The only code that touches its private parts."""
