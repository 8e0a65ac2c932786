"""Parallel drafting without a cache: the whole text, then mask tokens, in one dense pass."""

import torch


def draft_logits(dense_model, token_ids, num_drafts, mask_token_id):
    """float [num_drafts, V]: of the newest token and of each mask token behind it.

    `dense_model` is a transformers model.
    """
    ids = [*token_ids, *[mask_token_id] * (num_drafts - 1)]
    with torch.no_grad():
        logits_TV = dense_model(torch.tensor([ids])).logits[0]
    return logits_TV[len(token_ids) - 1 :]
