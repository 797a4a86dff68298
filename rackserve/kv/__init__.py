"""Floor 2: the KV blocks of one rank: which are free, cached or in use, and by whom.

`Arena` counts slots, `RankCache` gives them to sequences as leases and keeps what they computed for the next ones.
Nothing here knows tokens, tensors, requests or time, and nothing is sent: presence events are drained by the rank's node.
Law: free + cached + in use = total, and every slot has exactly one owner.
"""
