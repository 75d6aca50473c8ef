"""What a pool's processes say about themselves, and what that means for the one who runs it."""
