"""What is known of each operation, in every framework: where it fails, and what repairs it."""
