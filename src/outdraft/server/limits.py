"""Time limits of connections, in seconds: the defaults of `outdraft serve`."""

HEADER_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 60.0
