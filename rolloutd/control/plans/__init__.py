"""Plan files before and after they are submitted: preview, review, configurations, verdicts."""
