-- Here `tokens` is what was used so far. What Redis has lost is stated anew, and nothing is charged twice.
local held = number(redis.call('GET', KEYS[1]), tokens)
each(function(s)
  hold_place(s)
  if tokens > held then
    charge(s, tokens - held)
    keep(s)
  end
end)
redis.call('SET', KEYS[1], math.max(held, tokens), 'PX', lease)
return 0
