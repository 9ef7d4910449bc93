"""What routing does to a day of traffic, without a GPU: `katydid simulate` replays a trace over simulated engines."""
