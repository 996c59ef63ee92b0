"""Pydantic models of requests and answers, for the document at `/openapi.json` only."""
