"""Pipeline parallelism: schedules, the engine that runs them, and messages between stages."""
