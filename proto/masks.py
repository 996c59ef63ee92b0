"""What shards say of a request whose masks exclude every token, so that routers name the fields that do."""

ALL_EXCLUDED = "the masks of the request (allowed_token_ids, bad_words, min_tokens) exclude every token"
