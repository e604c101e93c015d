"""`specgen serve`: a server that speaks OpenAI's protocol. One generation runs at a time, in the
thread that loaded the models; another thread talks to the clients."""
