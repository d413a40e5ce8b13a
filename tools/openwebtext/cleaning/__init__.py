"""Building blocks of the commands that clean web text."""
