"""Real servers and worlds that several tests share."""
