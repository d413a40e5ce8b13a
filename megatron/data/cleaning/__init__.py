"""What the cleaning of web text is made of; its commands are in tools/openwebtext."""
