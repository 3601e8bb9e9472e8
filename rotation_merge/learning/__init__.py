"""Learned matching: the same group elements, optimised so that models between anchor and donor behave well."""
