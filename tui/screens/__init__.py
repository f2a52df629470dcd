"""The screens: each shows one side of the model and carries out the moves that belong to it."""
