"""What is asked: adopt the arrays of a call, describe its problem."""
