"""Operations on a GPU."""
