"""How many things each rank of a group has, where they are spread evenly."""


def shard_width(number: int, size: int) -> int:
    """What each of `size` ranks has of so many things; the last has what is left."""
    return -(-number // size)


def can_spread(number: int, size: int) -> bool:
    """Whether something is left for the last rank."""
    return shard_width(number, size) * (size - 1) < number
