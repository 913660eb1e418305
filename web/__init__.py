"""The page and the JSON API: what there is to see of queues, jobs and events. It only reads."""
