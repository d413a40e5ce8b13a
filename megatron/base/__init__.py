"""Foundation of all packages: user errors, declared options and their reader, documents, atomic files."""
