"""The arguments of a call: adopt its arrays, check everything, and describe it as a `Problem`."""
