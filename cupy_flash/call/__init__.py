"""The arguments of a call: adopt its arrays, check everything, describe it as a `Problem`."""
