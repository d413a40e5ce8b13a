"""Who talks to whom: ranks, groups, devices, launch and teardown."""
