"""The gateway's side of katydid.engine.v1: sessions, block events, and the fleet they make up."""
