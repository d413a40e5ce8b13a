"""What all packages stand on: errors for users, declared options and their one reader, documents, whole files."""
