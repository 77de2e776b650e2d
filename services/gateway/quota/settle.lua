-- Here `tokens` is what was used in all. A grant that is not known was settled before, or its lease ran out.
local held = redis.call('GET', KEYS[1])
redis.call('DEL', KEYS[1])
each(function(s)
  redis.call('ZREM', s.places, grant)
  if held then
    charge(s, tokens - tonumber(held))
    keep(s)
  end
end)
return 0
