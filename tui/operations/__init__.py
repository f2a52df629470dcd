"""What a user can do: keys, dialogs and the requests they send."""
