"""Parts shared by several operators."""
