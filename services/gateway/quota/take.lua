-- Answers {subject that refuses or 0, its limit as in LIMITS, ms to wait, ms of now, then both levels of each subject}.
-- ARGV[4 + 3 * subjects]: ms to wait for a place.
local place_wait = tonumber(ARGV[#ARGV])
local subjects, answer = {}, {0, 0, 0, now}

local function refuse(s, limit, wait)
  if wait > answer[3] then answer[1], answer[2], answer[3] = s.index, limit, wait end
end

local function wait(level, rate, amount)
  if rate < 0 then return 0 end
  return math.max(0, math.ceil((amount * TICKS - level) / rate))
end

each(function(s)
  subjects[s.index] = s
  refuse(s, 1, wait(s.requests, s.request_rate, 1))
  refuse(s, 2, wait(s.tokens, s.token_rate, tokens))
  if s.most >= 0 then
    redis.call('ZREMRANGEBYSCORE', s.places, '-inf', now)
    if redis.call('ZCARD', s.places) >= s.most then refuse(s, 3, place_wait) end
  end
end)
for _, s in ipairs(subjects) do
  if answer[1] == 0 then
    if s.request_rate > 0 then s.requests = s.requests - TICKS end
    charge(s, tokens)
    hold_place(s)
    keep(s)
  end
  table.insert(answer, s.requests)
  table.insert(answer, s.tokens)
end
if answer[1] == 0 then redis.call('SET', KEYS[1], tokens, 'PX', lease) end
return answer
