"""Which calls of a captured graph have to wait for which, and how the others run side by side."""
