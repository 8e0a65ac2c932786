"""Time limits in seconds: the defaults of `outdraft serve`."""

HEADER_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 60.0
REPLICA_TIMEOUT_S = 5.0
