"""Our table: cubes and a bin, or a bar for two arms."""
