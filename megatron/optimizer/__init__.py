"""Update rules, loss scaling, and schedules."""
